"""What a model name stands for: a folder or a commit on the hub, and the code that it ships."""
