"""The scheduler as Envoy's endpoint picker: the gateway without its wire.

Envoy moves the bytes; for each request it asks over gRPC (ext_proc) where it is to go. Intake,
admission, placement, health, metrics and /admin are the gateway's own. Needs the extra ``picker``.
"""
