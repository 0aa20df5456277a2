"""Mathematics that several methods share; a block imports no method."""
