"""`make demo`: one command from text to the proof that a preempted run lost nothing."""
