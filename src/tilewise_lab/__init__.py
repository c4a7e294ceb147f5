"""What a person learns and measures with: the command line, the demo, the benchmark, the course, the page.

Everything here imports `tilewise`; nothing there imports this. A model needs `tilewise` alone.
"""
