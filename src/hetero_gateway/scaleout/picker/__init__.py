"""The scheduler as Envoy's endpoint picker: the gateway without its HTTP data plane.

Envoy moves the bytes; for each request it asks over gRPC (ext_proc) where to send it. Intake,
admission, placement, health, metrics and /admin are the gateway's own. Needs the extra ``picker``.
"""
