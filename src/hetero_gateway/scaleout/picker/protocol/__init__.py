"""The protobuf messages of ext_proc and of gRPC's health checks, as far as they are used here."""
