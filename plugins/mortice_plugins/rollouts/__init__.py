"""Rollout engines: how completions are sampled."""
