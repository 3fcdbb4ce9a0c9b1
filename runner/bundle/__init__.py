"""The executable as a file: where the model lies in it, what the manifest says, how another one is packed."""
