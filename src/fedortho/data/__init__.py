"""Images and labels: where they come from, how they are split, and which of them a request means."""
