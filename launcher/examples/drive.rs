//! Drives a launcher by hand, in virt-handler's place: `drive SOCKET COMMAND [ARGUMENT]`.
//!
//! ```text
//! drive SOCKET start VMI.json [CACHE_DIRECTORY]   hello, sync, then follow the state
//! drive SOCKET watch | pause | unpause | reset | soft-reboot | kill | finish | shutdown SECONDS
//! drive SOCKET console [TEXT]                     print the serial console, send a line first
//! drive SOCKET screenshot FILE
//! ```

use std::{
    io::Write,
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use hyper_util::rt::TokioIo;
use protocol::{launcher_client::LauncherClient, *};
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};

async fn connect(socket: PathBuf) -> anyhow::Result<LauncherClient<Channel>> {
    let channel = Endpoint::from_static("http://launcher")
        .connect_with_connector(tower::service_fn(move |_| {
            let socket = socket.clone();
            async move { Ok::<_, std::io::Error>(TokioIo::new(UnixStream::connect(socket).await?)) }
        }))
        .await?;
    Ok(LauncherClient::new(channel).max_decoding_message_size(MAX_MESSAGE_SIZE))
}

async fn follow(client: &mut LauncherClient<Channel>, limit: Duration) -> anyhow::Result<()> {
    let started = Instant::now();
    let mut states = client.watch(WatchRequest {}).await?.into_inner();
    while let Ok(Some(state)) =
        tokio::time::timeout(limit.saturating_sub(started.elapsed()), states.message()).await.unwrap_or(Ok(None))
    {
        println!("{:7.3}s {} {:?}", started.elapsed().as_secs_f32(), state.lifecycle().as_str_name(), state);
        if !state.failure.is_empty() || matches!(state.lifecycle(), Lifecycle::Shutoff | Lifecycle::Crashed) {
            break;
        }
    }
    Ok(())
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (Some(socket), Some(command)) = (args.first(), args.get(1)) else { bail!("drive SOCKET COMMAND [ARGUMENT]") };
    let argument = args.get(2).cloned();
    let mut client = connect(socket.into()).await?;
    let started = Instant::now();
    match command.as_str() {
        "start" => {
            let vmi = std::fs::read(argument.context("VMI file")?)?;
            let object: serde_json::Value = serde_json::from_slice(&vmi)?;
            let uid = object["metadata"]["uid"].as_str().unwrap_or_default().to_owned();
            let mut cache = Vec::new();
            for entry in args.get(3).map(std::fs::read_dir).transpose()?.into_iter().flatten() {
                let entry = entry?;
                cache.push(CacheFile {
                    name: entry.file_name().to_string_lossy().into_owned(),
                    content: std::fs::read(entry.path())?,
                });
            }
            let reply = client
                .hello(HelloRequest { uid, capabilities_cache: cache, allow_emulation: true, features: Vec::new() })
                .await?;
            println!("{:7.3}s hello: {:?}", started.elapsed().as_secs_f32(), reply.into_inner());
            let nics = match args.get(4) {
                Some(tap) => vec![Nic {
                    name: "default".into(),
                    tap: tap.clone(),
                    bridge: args.get(5).cloned().unwrap_or_default(),
                    mtu: 1450,
                    mac: "02:00:00:00:00:02".into(),
                    dhcp: Some(DhcpLease {
                        address: "10.0.2.2/24".into(),
                        gateway: "10.0.2.1".into(),
                        server: "10.0.2.1".into(),
                        routes: Vec::new(),
                    }),
                    dhcp6: None,
                }],
                None => Vec::new(),
            };
            let options = VmiOptions {
                smbios: Some(SmBios {
                    manufacturer: "KubeVirt".into(),
                    product: "None".into(),
                    family: "KubeVirt".into(),
                    ..SmBios::default()
                }),
                balloon_stats_period: 10,
                nics,
                ..VmiOptions::default()
            };
            let reply = client.sync(SyncRequest { vmi, options: Some(options) }).await?;
            println!("{:7.3}s sync: {:?}", started.elapsed().as_secs_f32(), reply.into_inner());
            follow(&mut client, Duration::from_millis(200)).await?;
        }
        "watch" => follow(&mut client, Duration::from_secs(argument.map_or(Ok(3600), |a| a.parse())?)).await?,
        "pause" => drop(client.pause(PauseRequest {}).await?),
        "unpause" => drop(client.unpause(UnpauseRequest {}).await?),
        "reset" => drop(client.reset(ResetRequest {}).await?),
        "soft-reboot" => drop(client.soft_reboot(SoftRebootRequest {}).await?),
        "kill" => drop(client.kill(KillRequest {}).await?),
        "finish" => drop(client.finish(FinishRequest {}).await?),
        "shutdown" => {
            let grace_period_seconds = argument.context("seconds")?.parse()?;
            drop(client.shutdown(ShutdownRequest { grace_period_seconds }).await?);
        }
        "screenshot" => {
            let png = client.screenshot(ScreenshotRequest {}).await?.into_inner().png;
            std::fs::write(argument.context("file")?, png)?;
        }
        "console" => {
            let (sender, receiver) = tokio::sync::mpsc::channel(4);
            let line = argument.map(|text| format!("{text}\r")).unwrap_or_default();
            sender.send(ConsoleInput { data: line.into_bytes(), replay: true }).await?;
            let stream = tokio_stream::wrappers::ReceiverStream::new(receiver);
            let mut output = client.console(stream).await?.into_inner();
            while let Ok(Ok(Some(chunk))) = tokio::time::timeout(Duration::from_secs(3), output.message()).await {
                std::io::stdout().write_all(&chunk.data)?;
            }
        }
        other => bail!("unknown command {other}"),
    }
    println!("{:7.3}s done", started.elapsed().as_secs_f32());
    Ok(())
}
