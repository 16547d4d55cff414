"""What a method may ask of data: queries and training plans, the engine that answers them, and their cost."""
