//! The user's terminal in raw mode, put back as it was however the program ends.

use std::{
    io::{IsTerminal, Read},
    sync::Mutex,
};

use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};
use tokio::sync::mpsc;

use crate::Error;

/// What to restore; kept outside the guard so that the end by a signal can restore it too.
static BEFORE: Mutex<Option<Termios>> = Mutex::new(None);

/// Raw mode while it lives. Without a terminal on standard input it does nothing.
pub struct RawMode(());

impl RawMode {
    /// Switches standard input to raw mode.
    pub fn enter() -> Result<Self, Error> {
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
            // Nothing can be done when the terminal itself is gone.
            let _ = tcsetattr(std::io::stdin(), OptionalActions::Flush, &before);
        }
    }
}

/// Standard input in chunks, read by a thread of its own: a blocked read of a terminal cannot be cancelled, and must
/// not keep the program from ending. The channel closes at the end of input.
pub fn input() -> mpsc::Receiver<Vec<u8>> {
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
