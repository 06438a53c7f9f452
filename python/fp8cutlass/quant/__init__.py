"""From real numbers to FP8 and back: descales, rotation, smoothing, and the layout of V."""
