"""Benchmarks that need a GPU: `python -m keys35.bench.encoder`."""
