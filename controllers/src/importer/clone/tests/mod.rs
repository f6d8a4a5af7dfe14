mod consumer;
mod handover;
mod steps;
mod wakes;
