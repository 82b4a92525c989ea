"""Strategy `whole`: the plain training loop on one device."""
