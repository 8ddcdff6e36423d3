"""From rows to documents to packs, with a ledger of every token."""
