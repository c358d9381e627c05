//! Placeholder until its part lands.
