//! A headless Chromium, driven by the DevTools protocol over pipes.

use std::{path::PathBuf, process::Stdio, time::Duration};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    process::{Child, ChildStdin, ChildStdout, Command},
    time::{Instant, sleep, timeout},
};

use crate::environment::TIMEOUT;

/// Chromium reads commands from descriptor 3 and writes answers to 4. Its sandbox does not start for root.
const COMMAND: &str = "exec chromium --headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run \
     --window-size=1280,800 --remote-debugging-pipe --user-data-dir=\"$1\" about:blank 3<&0 4>&1 0</dev/null 1>&2 2>/dev/null";
/// Width of pictures in pixels.
const WIDTH: u32 = 1240;
/// Time limit of a command.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);

/// A browser with a profile of its own.
pub struct Browser {
    process: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
    profile: PathBuf,
    last: u64,
}

/// A tab.
pub struct Tab(String);

impl Browser {
    /// Starts a browser; `None` if this host has no Chromium. `name` distinguishes it from other browsers.
    ///
    /// # Errors
    /// Fails if it does not start.
    pub fn start(name: &str) -> Result<Option<Self>> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        if !std::env::split_paths(&path).any(|folder| folder.join("chromium").is_file()) {
            return Ok(None);
        }
        let profile = std::env::temp_dir().join(format!("browser-{name}"));
        let mut command = Command::new("sh");
        command.args(["-c", COMMAND, "sh"]).arg(&profile);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).kill_on_drop(true);
        let mut process = command.spawn().context("cannot start Chromium")?;
        let commands = process.stdin.take().context("no input of Chromium")?;
        let answers = BufReader::new(process.stdout.take().context("no output of Chromium")?);
        Ok(Some(Self { process, commands, answers, profile, last: 0 }))
    }

    /// Ends the browser and removes its profile.
    ///
    /// # Errors
    /// Fails if it does not end.
    pub async fn stop(mut self) -> Result<()> {
        self.call(None, "Browser.close", json!({})).await?;
        timeout(COMMAND_TIMEOUT, self.process.wait()).await.context("Chromium does not end")??;
        std::fs::remove_dir_all(&self.profile).context("cannot remove the profile of Chromium")
    }

    /// Carries out a command of the protocol. Skips events.
    async fn call(&mut self, tab: Option<&Tab>, method: &str, parameters: Value) -> Result<Value> {
        self.last += 1;
        let mut command = json!({"id": self.last, "method": method, "params": parameters});
        if let Some(Tab(session)) = tab {
            command["sessionId"] = json!(session);
        }
        let exchange = async {
            self.commands.write_all(format!("{command}\0").as_bytes()).await?;
            loop {
                let mut message = Vec::new();
                self.answers.read_until(0, &mut message).await?;
                ensure!(message.pop() == Some(0), "Chromium has ended");
                let mut message = serde_json::from_slice::<Value>(&message)?;
                if message["id"] == self.last {
                    ensure!(message["error"].is_null(), "{}", message["error"]);
                    return Ok(message["result"].take());
                }
            }
        };
        timeout(COMMAND_TIMEOUT, exchange).await.context("no answer in time").flatten().context(method.to_owned())
    }

    /// Opens a page in a new tab.
    ///
    /// # Errors
    /// Fails if the browser fails.
    pub async fn open(&mut self, url: &str) -> Result<Tab> {
        let target = self.call(None, "Target.createTarget", json!({"url": url})).await?;
        let attach = json!({"targetId": target["targetId"], "flatten": true});
        let session = self.call(None, "Target.attachToTarget", attach).await?;
        Ok(Tab(session["sessionId"].as_str().context("no session")?.to_owned()))
    }

    /// Brings a tab to the front: the others do not draw.
    async fn show(&mut self, tab: &Tab) -> Result<()> {
        self.call(Some(tab), "Page.bringToFront", json!({})).await.map(drop)
    }

    /// Returns a picture of a whole page: PNG in base64.
    ///
    /// # Errors
    /// Fails if the browser fails.
    pub async fn picture(&mut self, tab: &Tab) -> Result<String> {
        self.show(tab).await?;
        // The page is never lower than the window.
        let mut height = json!(1);
        for _ in 0..2 {
            let size = json!({"width": WIDTH, "height": height, "deviceScaleFactor": 1, "mobile": false});
            self.call(Some(tab), "Emulation.setDeviceMetricsOverride", size).await?;
            height = self.evaluate(tab, "document.documentElement.scrollHeight").await?;
        }
        let taken = self.call(Some(tab), "Page.captureScreenshot", json!({"format": "png"})).await?;
        taken["data"].as_str().map(str::to_owned).context("no picture")
    }

    /// Returns the value of an expression in a page.
    ///
    /// # Errors
    /// Fails with the exception of the expression.
    pub async fn evaluate(&mut self, tab: &Tab, expression: &str) -> Result<Value> {
        let parameters = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let mut answer = self.call(Some(tab), "Runtime.evaluate", parameters).await?;
        let exception = &answer["exceptionDetails"];
        ensure!(exception.is_null(), "{expression}: {}", exception["exception"]["description"]);
        Ok(answer["result"]["value"].take())
    }

    /// Waits until an expression is true in a page.
    ///
    /// # Errors
    /// Fails after a time limit with the text of the page.
    pub async fn wait(&mut self, tab: &Tab, expression: &str) -> Result<()> {
        self.show(tab).await?;
        let end = Instant::now() + TIMEOUT;
        // A page that is loading has no document to look at.
        while !self.evaluate(tab, expression).await.is_ok_and(|value| value == true) {
            if Instant::now() > end {
                let page = self.evaluate(tab, "document.body.innerText").await?;
                bail!("not true within {TIMEOUT:?}: {expression}; the page: {page}");
            }
            sleep(Duration::from_millis(500)).await;
        }
        Ok(())
    }

    /// Presses the keys of a text, and Enter.
    ///
    /// # Errors
    /// Fails if the browser fails.
    pub async fn type_line(&mut self, tab: &Tab, text: &str) -> Result<()> {
        self.show(tab).await?;
        for character in text.chars().map(String::from).chain(["\r".to_owned()]) {
            let (key, code) = if character == "\r" { ("Enter", 13) } else { (character.as_str(), 0) };
            let mut press = json!({"type": "keyDown", "key": key, "text": character, "windowsVirtualKeyCode": code});
            self.call(Some(tab), "Input.dispatchKeyEvent", press.clone()).await?;
            press["type"] = json!("keyUp");
            self.call(Some(tab), "Input.dispatchKeyEvent", press).await?;
        }
        Ok(())
    }
}
