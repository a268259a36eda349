"""The GPU exporter: what NVML says of every GPU, joined with who holds it.

- `nvml.py` alone calls NVML, in a process of its own (`reader.py`) that may hang or crash; `sampling.py`
  asks it with a deadline and never passes on an old answer.
- `pod_resources.py` asks the kubelet who was given which GPU, `pods.py` the apiserver whose pods these are,
  `processes.py` the kernel where a process belongs. `attribution.py` joins them and is pure.
- `collector.py` gathers all of it once a scrape, `series.py` turns it into Prometheus series, `endpoint.py`
  serves them.
"""
