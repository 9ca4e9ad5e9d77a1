// shows the page anew while somebody looks at it, and nobody points at a chart
const main = () => document.querySelector("main"), away = document.createElement("p");
away.className = "bad";
const reload = async () => {
  try {
    if (!document.hidden && !document.querySelector("figure:hover")) {
      const answer = await fetch(location.href, {cache: "no-store"});
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      const next = new DOMParser().parseFromString(await answer.text(), "text/html");
      main().replaceWith(next.querySelector("main"));
      document.title = next.title;
    }
  } catch (error) {
    away.textContent = `hotbed watch does not answer since ${new Date().toISOString().slice(11, 19)} UTC: ${error.message}`;
    if (!away.isConnected) main().prepend(away);
  }
  setTimeout(reload, RELOAD_SECONDS * 1000);
};
setTimeout(reload, RELOAD_SECONDS * 1000);
