//! Running commands of `kubectl virt`: serial consoles, forwarded ports and displays.

mod console;
mod served;

pub use console::Console;
pub use served::{Ended, Served, echo, ends};
