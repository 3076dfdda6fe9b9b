// Search where the site is opened as a file. Browsers start no worker from a file, so its script runs in a hidden frame.

const loaded = (inner, url) =>
  new Promise((resolve, reject) => {
    const script = inner.document.createElement("script");
    script.onload = resolve;
    script.onerror = () => reject(new Error(`${url} could not be loaded`));
    script.src = url;
    inner.document.body.append(script);
  });

// The theme's own worker looks for this name to find out that it runs in a frame.
window.IFrameWorker = class extends EventTarget {
  constructor(url) {
    super();
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    document.body.append(this.frame);
    const inner = this.frame.contentWindow;
    inner.document.open(); // or the browser may replace the empty page later, with all that is in it
    inner.document.write("<body></body>");
    inner.document.close();
    inner.postMessage = (data) => {
      const event = new MessageEvent("message", { data });
      this.onmessage?.(event); // a worker calls this property, too, which an EventTarget does not
      this.dispatchEvent(event);
    };
    inner.importScripts = async (...urls) => {
      for (const each of urls) await loaded(inner, each);
    };
    this.started = loaded(inner, url);
  }

  postMessage(data) {
    this.started.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
  }

  terminate() {
    this.frame.remove();
  }
};

if (location.protocol === "file:") window.Worker = window.IFrameWorker;
