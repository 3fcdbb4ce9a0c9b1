"""The commands: one file each. Assembles what the layers below offer."""
