mod handover;
mod steps;
mod wakes;
