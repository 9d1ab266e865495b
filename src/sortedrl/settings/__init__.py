"""What the settings of all commands share. Each component has its own settings beside it; a command composes them."""
