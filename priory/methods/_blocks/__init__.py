"""Mathematics that several methods share, or that is too long for the file of one; a block imports no method."""
