"""Commands for operators of a running server. The server's side is `ridgeline.router.front.admin`.

client.py     calls to the paths of operators
decisions.py  `ridgeline decisions`
drain.py      `ridgeline drain`
mode.py       `ridgeline mode`
record.py     `ridgeline record`
scale.py      `ridgeline scale` and `ridgeline restart`
"""
