"""The harness of the benchmarks: cases, processes, servers, records and the report."""
