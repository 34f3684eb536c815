"""Rollouts for engines that are reached from outside. Nothing here imports an engine."""
