"""What a person learns and measures with: the command line, the demo, the benchmark, the course, the page.

Everything here imports `tilewise`. In the library only `explain`, `explain_kv` and `Plan.simulate` import this package:
`tilewise_lab.costs`, when they are called. A model needs `tilewise` alone.
"""
