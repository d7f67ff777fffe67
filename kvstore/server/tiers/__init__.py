"""Tiers below DRAM."""
