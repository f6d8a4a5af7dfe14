//! `kubectl virt ui`, used in a browser.

use anyhow::{Context, Result, ensure};
use base64::{Engine, engine::general_purpose::STANDARD as BASE64};
use ferrovirt_e2e_tests::{Browser, Story, Tab, repository, story};
use serde_json::json;

use crate::manifests;

/// Variable with the file for a picture of the list: `make console-picture`.
const PICTURE: &str = "CONSOLE_PICTURE";
/// Fills lines of the guest's screen, in reverse video.
const FILL_LINES: &str = r"printf '\033[2J\033[H\033[7m%300s\033[0m' '' >/dev/tty1; echo lines filled: $((40+2))";
/// Counts the rows of pixels of the display that are lit from the left to the right.
const LIT_ROWS: &str = "(() => {
    const canvas = document.querySelector('#screen canvas');
    const { data, width, height } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
    const isLit = (pixel) => data[4 * pixel] + data[4 * pixel + 1] + data[4 * pixel + 2] > 300;
    const isRow = (row) => [...Array(width).keys()].every((column) => isLit(row * width + column));
    return [...Array(height).keys()].filter(isRow).length;
})()";

#[test]
fn vm_is_started_used_and_stopped_in_a_browser_and_nobody_else_reaches_the_page() {
    story("web-console", async |s| {
        let Some(mut browser) = Browser::start(&s.namespace)? else {
            skips::skip("chromium");
            return Ok(());
        };
        let used = use_page(s, &mut browser).await;
        browser.stop().await?;
        used
    });
}

/// Returns an expression that finds the button of an action.
fn button(label: &str) -> String {
    format!("document.querySelector('button[aria-label=\"{label}\"]')")
}

async fn use_page(s: &Story, browser: &mut Browser) -> Result<()> {
    s.apply(&manifests::vm("web", "Halted")).await?;
    s.apply(&manifests::vm("db", "Halted")).await?;
    s.apply(&manifests::vm("analysis", "Always").replace("guest: 128Mi", "guest: 900Gi")).await?;
    let (plugin, url) = s.web_console().await?;
    let list = browser.open(&url).await?;
    let shows = |vm: &str, text: &str| {
        let rows = "[...document.querySelectorAll('#vms tbody tr')].map((row) => row.innerText)";
        format!("{rows}.some((row) => row.startsWith('{vm}') && row.includes('{text}'))")
    };
    browser.wait(&list, &shows("web", "Stopped")).await?;
    let is_disabled = browser.evaluate(&list, &format!("{}.disabled", button("Stop web"))).await?;
    ensure!(is_disabled == true, "a stopped VM can be stopped");
    browser.evaluate(&list, &format!("{}.click()", button("Start web"))).await?;
    s.wait_running("web").await?;
    browser.wait(&list, &shows("web", "Running")).await?;
    browser.wait(&list, &shows("analysis", "Insufficient memory")).await?;
    if let Ok(path) = std::env::var(PICTURE) {
        std::fs::write(repository().join(path), BASE64.decode(browser.picture(&list).await?)?)?;
    }

    let console = page(browser, &list, "Console").await?;
    let screen = |text: &str| {
        format!("document.querySelector('.xterm-rows').innerText.replaceAll('\\u00a0', ' ').includes('{text}')")
    };
    log_in(browser, &console, &screen).await?;
    let display = page(browser, &list, "Display").await?;
    browser.wait(&display, "document.getElementById('state').textContent === 'Connected.'").await?;
    browser.wait(&display, "document.querySelector('#screen canvas').width >= 640").await?;
    let before = browser.evaluate(&display, LIT_ROWS).await?;
    ensure!(before == 0, "{before} rows of the display are lit");
    browser.type_line(&console, FILL_LINES).await?;
    browser.wait(&console, &screen("lines filled: 42")).await?;
    browser.wait(&display, &format!("{LIT_ROWS} >= 8")).await?;

    other_pages_are_refused(browser, plugin.port, &url).await?;
    browser.evaluate(&list, &format!("{}.click()", button("Stop web"))).await?;
    browser.evaluate(&list, "document.getElementById('question-yes').click()").await?;
    browser.wait(&list, &shows("web", "Stopped")).await?;
    browser.wait(&console, "document.getElementById('state').textContent.startsWith('Disconnected')").await?;
    plugin.stop().await?;
    Ok(())
}

/// Opens the page of a link in the list.
async fn page(browser: &mut Browser, list: &Tab, link: &str) -> Result<Tab> {
    let url =
        browser.evaluate(list, &format!("document.querySelector('a[aria-label=\"{link} of web\"]').href")).await?;
    browser.open(url.as_str().context("no address")?).await
}

async fn log_in(browser: &mut Browser, console: &Tab, screen: &impl Fn(&str) -> String) -> Result<()> {
    browser.wait(console, &screen("login:")).await?;
    browser.type_line(console, "root").await?;
    browser.wait(console, &screen("Password:")).await?;
    browser.type_line(console, "story").await?;
    browser.type_line(console, "echo logged in: $((40+2))").await?;
    browser.wait(console, &screen("logged in: 42")).await
}

/// Pages without the token see nothing, whether they are of this server or of another.
async fn other_pages_are_refused(browser: &mut Browser, port: u16, url: &str) -> Result<()> {
    let stranger = browser.open(&format!("http://127.0.0.1:{port}/")).await?;
    browser.wait(&stranger, "document.body.innerText.startsWith('403 Forbidden')").await?;
    let guess =
        format!("fetch('/{}/vms/x/web/stop', {{method: 'POST'}}).then((answer) => answer.status)", "0".repeat(64));
    let open = format!(
        "new Promise((done) => {{
            const socket = new WebSocket('ws://localhost:{port}{}watch');
            socket.onopen = () => done('open');
            socket.onerror = () => done('refused');
        }})",
        url.split_once(&port.to_string()).context("no port")?.1
    );
    // The policy of the server forbids its own refusal to connect to anything but itself; a blank page has no policy.
    let blank = browser.open("about:blank").await?;
    for (page, expression, expected) in [(&stranger, &guess, json!(403)), (&blank, &open, json!("refused"))] {
        let answer = browser.evaluate(page, expression).await?;
        ensure!(answer == expected, "{expression}: {answer}");
    }
    Ok(())
}
