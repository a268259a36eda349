"""Jobs as TrainingJob resources and attempts as PyTorchJobs: the only importer of the Kubernetes client."""
