//! Raw mode of the user's terminal, restored on every exit of the program.

use std::{
    io::{IsTerminal, Read},
    sync::Mutex,
};

use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};
use tokio::sync::mpsc;

use crate::Error;

/// Settings to restore. They are static so that a signal handler can restore them too.
static BEFORE: Mutex<Option<Termios>> = Mutex::new(None);

/// Guard that holds the terminal in raw mode. It does nothing if standard input is no terminal.
pub(crate) struct RawMode(());

impl RawMode {
    /// Switches standard input to raw mode.
    pub(crate) fn enter() -> Result<Self, Error> {
        if std::io::stdin().is_terminal() {
            let failed = |e: rustix::io::Errno| Error::io("cannot switch the terminal to raw mode")(e.into());
            let before = tcgetattr(std::io::stdin()).map_err(failed)?;
            let mut raw = before.clone();
            raw.make_raw();
            if let Ok(mut kept) = BEFORE.lock() {
                *kept = Some(before);
            }
            tcsetattr(std::io::stdin(), OptionalActions::Now, &raw).map_err(failed)?;
        }
        Ok(Self(()))
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        if let Ok(mut kept) = BEFORE.lock()
            && let Some(before) = kept.take()
        {
            // A closed terminal needs no restoring.
            let _ = tcsetattr(std::io::stdin(), OptionalActions::Flush, &before);
        }
    }
}

/// Reads standard input in chunks on a separate thread, since a blocked read of a terminal cannot be cancelled and must
/// not delay the exit. The channel closes at the end of input.
pub(crate) fn input() -> mpsc::Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel(8);
    std::thread::spawn(move || {
        let mut buffer = [0_u8; 16 * 1024];
        loop {
            match std::io::stdin().lock().read(&mut buffer) {
                Ok(0) => break,
                Ok(length) => {
                    if sender.blocking_send(buffer[..length].to_vec()).is_err() {
                        break;
                    }
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
    });
    receiver
}
