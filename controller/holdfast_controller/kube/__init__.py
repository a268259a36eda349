"""Jobs as TrainingJob resources, attempts in the kind that was chosen: the only importer of the client."""
