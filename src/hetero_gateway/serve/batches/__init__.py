"""The batch API: files of requests and answers, and the sender of their lines."""
