"""The compiled extension: finding it, loading it, and calling its operators."""
