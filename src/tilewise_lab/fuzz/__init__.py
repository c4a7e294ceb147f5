"""Random calls of the public functions: each must give a right answer, or one AttentionError.

`draw` makes cases, `case` writes each as a few lines of Python, `judge` runs those lines and holds the results against
`oracle` in float64, `shrink` makes a failing case small; `command` is `tilewise fuzz`. Of ten calls two have a
KV cache (`kv` draws and writes those, `kv_oracle` knows what they should leave) and one a cache of MLA (`mla`,
`mla_oracle`); two are of `tilewise.sparse` (`sparse`), and one has a block mask that was cut or has grown (`grown`).
"""
