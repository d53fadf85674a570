"""What a step claims."""
