"""Does spending tokens by an allocator help? Tasks on real data, offline: `python bench/quality/run.py`."""
