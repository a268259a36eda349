"""Holdfast's controller: REST API, reconciler, engines and command line. Imports no torch."""
