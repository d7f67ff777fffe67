"""What people and dashboards see: metrics and logs. Nothing below the wiring imports it."""
