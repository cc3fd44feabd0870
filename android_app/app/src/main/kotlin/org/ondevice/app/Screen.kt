package org.ondevice.app

import android.net.Uri
import android.os.Bundle
import android.view.View
import android.widget.FrameLayout

/**
 * One of the six tabs. A screen builds its views from what is stored and running, and builds them anew when that
 * changes; what the user has typed lives in views with ids, which Android itself keeps across a rotation.
 */
abstract class Screen(protected val host: MainActivity) {
    protected val app: OndeviceApp = host.application as OndeviceApp
    protected val ui = Ui(host)

    /** Holds the content; [render] replaces what is in it. */
    val root = FrameLayout(host)

    abstract fun content(): View

    fun render() {
        val place = (root.getChildAt(0) as? View)?.scrollY ?: 0
        val view = content() // while the old views are still there to be asked what was typed
        root.removeAllViews()
        root.addView(view)
        if (place > 0) view.post { view.scrollTo(0, place) }
    }

    /** Called when the screen comes to the front and when it leaves. */
    open fun onShow() = Unit

    open fun onHide() = Unit

    open fun save(state: Bundle) = Unit

    open fun restore(state: Bundle) = Unit

    /** What the system's picker gave for a request of this screen. */
    open fun onPicked(request: Int, uri: Uri) = Unit

    /** What is being done at a place, with a way to end it if another app may hold it up; null when nothing is. */
    protected fun busy(place: String): View? {
        val row = ui.busy(app.jobs.words(place) ?: return null)
        if (!app.jobs.canCancel(place)) return row
        return ui.column(row, ui.button(R.string.cancel) { app.jobs.cancel(place) }.apply { id = R.id.cancel })
    }

    protected fun string(id: Int, vararg arguments: Any): String = host.getString(id, *arguments)
}
