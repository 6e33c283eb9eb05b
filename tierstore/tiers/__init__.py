"""The tiers: places that hold pages. They make no decisions."""
