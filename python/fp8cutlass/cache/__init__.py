"""Keys and values that outlive a call."""
