// The page of one response and of the responses that decide on its calls: steps, calls, approvals.

import { $, ROOT, add, addButton, headers, newElement, showLines } from "./elements.js";
import { enlargeable } from "./frame.js";
import { explain } from "./run.js";
import { events, refusal } from "./stream.js";

const PAUSE_MS = 1000;
const RUNNING = new Set(["queued", "in_progress"]);
const TITLES = {
  message: "Message",
  reasoning: "Reasoning",
  function_call: "Function call",
  mcp_call: "Call",
  mcp_list_tools: "Tools",
  mcp_approval_request: "Approval",
  image_generation_call: "Image",
};

/** Shows one response while its events arrive. */
class Shown {
  constructor(id) {
    this.id = id;
    this.last = -1; // number of the last event
    this.items = [];
    this.decisions = new Map(); // by the id of the approval request; null while a person decides
    this.element = add($("responses"), "article", "turn response", { ariaLabel: `Response ${id}` });
    add(this.element, "code", "request", { textContent: id });
    this.status = add(this.element, "p", "status", { role: "status" });
    this.list = add(this.element, "ol");
    this.error = add(this.element, "div", "error", { role: "alert", hidden: true });
  }

  /** Show the response as it is, and follow it to its end over any number of connections. */
  async follow() {
    for (;;) {
      try {
        // The events of one that has ended may not be stored any more.
        const found = await fetch(addressOf(this.id), { headers: headers() });
        if (!found.ok) throw await refusal(found);
        this.showResponse(await found.json());
        if (!RUNNING.has(this.response.status)) return;
        const after = this.last < 0 ? "" : `&starting_after=${this.last}`;
        const response = await fetch(`${addressOf(this.id)}?stream=true${after}`, { headers: headers() });
        if (!response.ok) throw await refusal(response);
        for await (const { data } of events(response.body)) {
          const event = JSON.parse(data);
          this.last = event.sequence_number;
          this.take(event);
          if (!RUNNING.has(this.response.status) || event.type === "error") return;
        }
      } catch (error) {
        if (!(error instanceof TypeError)) return showLines(this.error, explain(error));
      }
      this.status.textContent = "Connection lost. Reconnecting";
      await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
    }
  }

  take(event) {
    if (event.type === "error") showLines(this.error, [event.message]);
    if (event.response) this.showResponse(event.response);
    if (event.item) this.showItem(event.output_index, event.item);
    if (event.type === "response.output_text.delta") {
      this.items[event.output_index].body.append(event.delta);
    }
    if (event.type.startsWith("response.mcp_call.")) {
      this.items[event.output_index].state.textContent = event.type.slice("response.mcp_call.".length).replace("_", " ");
    }
  }

  showResponse(response) {
    this.response = response;
    this.status.textContent = response.status.replace("_", " ");
    if (response.error) showLines(this.error, [response.error.message]);
    response.output.forEach((item, index) => this.showItem(index, item));
  }

  showItem(index, item) {
    this.items[index] ??= this.newItem(item);
    const shown = this.items[index];
    shown.state.textContent = (item.status ?? (item.error ? "failed" : "")).replace("_", " ");
    shown.body.textContent = textOf(item);
    if (item.result) {
      const alt = item.revised_prompt ?? "Image";
      shown.body.append(enlargeable(newElement("img", "painted", { alt, src: `data:image/png;base64,${item.result}` })));
    }
    const waits = item.type === "mcp_approval_request" && !this.decisions.has(item.id);
    if (waits) this.askFor(item, shown.row);
  }

  newItem(item) {
    const row = add(this.list, "li");
    row.dataset.type = item.type;
    const head = add(row, "div", "item-head");
    add(head, "strong").textContent = TITLES[item.type] ?? item.type;
    add(head, "span").textContent = [item.server_label, item.name].filter(Boolean).join(".");
    const state = add(head, "span", "hint");
    const body = add(row, item.type === "message" ? "p" : "pre");
    return { row, state, body };
  }

  askFor(item, row) {
    this.decisions.set(item.id, null);
    const box = add(row, "div", "decide");
    for (const [text, approve, look] of [["Approve", true, ""], ["Refuse", false, "quiet"]]) {
      const decide = () => {
        this.decisions.set(item.id, approve);
        box.textContent = approve ? "Approved" : "Refused";
        if (![...this.decisions.values()].includes(null)) this.decide();
      };
      addButton(box, text, decide, look).ariaLabel = `${text} ${item.server_label}.${item.name}`;
    }
  }

  /** Send the decisions on all requests as one response, and follow it. */
  async decide() {
    const { model, tools, tool_choice, parallel_tool_calls, instructions } = this.response;
    const input = [...this.decisions].map(([id, approve]) => ({
      type: "mcp_approval_response", approval_request_id: id, approve,
    }));
    const body = JSON.stringify({
      model, tools, tool_choice, parallel_tool_calls, instructions, input,
      previous_response_id: this.id, background: true,
    });
    try {
      const sent = { ...headers(), "Content-Type": "application/json" };
      const response = await fetch(addressOf(""), { method: "POST", headers: sent, body });
      if (!response.ok) throw await refusal(response);
      await new Shown((await response.json()).id).follow();
    } catch (error) {
      showLines(this.error, explain(error));
    }
  }
}

function textOf(item) {
  if (item.type === "message") return item.content.map((part) => part.text ?? part.refusal ?? "").join("");
  if (item.type === "mcp_list_tools") return item.error ?? item.tools.map((tool) => tool.name).join(", ");
  if (item.type === "image_generation_call" && !item.error) return item.revised_prompt ?? "";
  const error = typeof item.error === "string" ? item.error : item.error?.message ?? item.error?.content?.[0]?.text;
  return [item.arguments, item.output ?? error].filter(Boolean).join("\n");
}

const addressOf = (id) => `${ROOT}v1/responses${id && "/"}${encodeURIComponent(id)}`;

async function open() {
  const id = $("id").value.trim();
  if (id === "") return showLines($("notice"), ["Enter the id of a response."]);
  showLines($("notice"), []);
  $("responses").replaceChildren();
  $("empty").hidden = true;
  history.replaceState(null, "", `#${id}`);
  await new Shown(id).follow();
}

$("form").addEventListener("submit", (event) => { event.preventDefault(); open(); });
if (location.hash.length > 1) {
  $("id").value = decodeURIComponent(location.hash.slice(1));
  open();
}
