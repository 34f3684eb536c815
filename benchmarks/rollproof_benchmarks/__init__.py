"""What it costs to bring a new adapter into a running engine: measured, beside the machine's own limits."""
