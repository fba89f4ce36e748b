"""What every room speaks: arrays that are declared, types, settings, noise, layouts."""
