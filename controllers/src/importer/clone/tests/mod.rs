mod handover;
mod steps;
