"""Holdfast's trainer: what runs inside a training job. See :mod:`holdfast_trainer.contract`."""
