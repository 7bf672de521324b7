"""Files copied as they are beside emitted modules."""
