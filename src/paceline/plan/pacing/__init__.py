"""How often A is updated, by any policy, among workers that are slow at times."""
