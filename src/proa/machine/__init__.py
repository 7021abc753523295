"""What this machine is and how fast it is. Belongs here: probing and measuring. Never: decisions, torch."""
