"""Generated from proto/ by scripts/generate-protos. Do not edit."""
