//! Standard output.

use std::io::Write;

use crate::error::Error;

/// Prints a line to standard output.
macro_rules! say {
    ($($text:tt)*) => {
        $crate::output::print(format_args!("{}\n", format_args!($($text)*)))
    };
}

/// Prints to standard output. A closed pipe (`| head`) is not an error.
pub(crate) fn print(text: std::fmt::Arguments<'_>) -> Result<(), Error> {
    let mut output = std::io::stdout().lock();
    match output.write_fmt(text).and_then(|()| output.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Error::io("cannot write to standard output")(error))
        }
        _ => Ok(()),
    }
}
